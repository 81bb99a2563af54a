"""Check and measure everything that needs a GPU: `python -m bench.gpu`."""
