"""The division of a model over several devices."""
