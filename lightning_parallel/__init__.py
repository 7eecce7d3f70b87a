"""Model parallelism for unmodified LightningModules, every measured number beside its formula."""

__version__ = "0.1.0.dev0"
