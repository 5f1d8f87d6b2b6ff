"""Encoders of pictures: each as data, computed by one set of modules."""
