"""Load a model slice by slice, and measure what it takes."""
