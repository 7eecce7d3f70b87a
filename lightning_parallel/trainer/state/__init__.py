"""What checkpoints, callbacks and optimizers hold of a model of which a rank has a part."""
