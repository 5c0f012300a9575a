"""Layers without memory: what makes a model is recorded, and computed later, one weight after the
other.

    record = Record()
    with record.recording(): task.configure_model()     parameters are meta tensors
    deferred = Deferred(task, record)                   buffers, which are small, have values from here on
    for name, value in deferred.values(): ...           each parameter's values, whole, one at a time

The recorded operations run in their order and draw the random numbers that they would have drawn,
so that values are the same bits. A value that is overwritten before it is read is not computed:
only its random numbers are drawn. Integers and masks are computed at once: only tensors of floating
point, and what is made of them, wait. (torchdistX's `deferred_init` recorded too.)
"""
