"""How each trainer trains a Fit, as its documentation does."""
