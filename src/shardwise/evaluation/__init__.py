"""How good the model is: held-out loss."""
