"""An export behind HTTP: the model (model.py), its requests in batches (batching.py), an ASGI app (app.py), on Ray or alone."""
