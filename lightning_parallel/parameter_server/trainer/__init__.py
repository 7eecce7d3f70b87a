"""What stands between the parameter server and Lightning's Trainer; the one place here that imports Lightning."""

# As in `lightning_parallel.trainer`: the strategies are imported before any module of this folder is half imported.
import lightning.pytorch  # noqa: F401
