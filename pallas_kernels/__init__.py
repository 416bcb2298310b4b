"""Pallas kernels for the expert hot paths: plain arrays in and out, no mesh and no model."""
