"""The model that a run starts from."""

from titan_rl.config.schema import Config
from titan_rl.records.rundir import RunDir


def base_model(config: Config, run_dir: RunDir) -> str:
    """Its directory; ``tiny`` is made in the run directory."""
    if config.model.path != "tiny":
        return config.model.path
    if not run_dir.base_model.exists():
        from titan_rl.models.tiny import make_tiny

        half = run_dir.base_model.with_suffix(".writing")  # a run that is killed must not leave half a model
        make_tiny(half, seed=config.run.seed)
        half.rename(run_dir.base_model)
    return str(run_dir.base_model)
