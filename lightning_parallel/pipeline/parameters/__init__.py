"""Which rank holds which parameter: taken out of the whole, initialized, shared and compared."""
