"""How a model is divided over several devices."""
