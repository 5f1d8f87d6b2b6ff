"""Pictures in prompts: from a file's bytes to what an encoder takes, with Pillow and NumPy; no JAX in it."""
