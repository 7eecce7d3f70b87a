"""L-BFGS on vectors of the servers, and batches in portions (Sandblaster)."""
