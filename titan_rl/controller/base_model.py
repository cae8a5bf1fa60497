"""The model that a run starts from."""

from titan_rl.config.sections.schema import Config
from titan_rl.data.storage.files import replacing
from titan_rl.records.run_directory.rundir import RunDir


def base_model(config: Config, run_dir: RunDir) -> str:
    """Its directory; ``tiny`` is made in the run directory."""
    if config.model.path != "tiny":
        return config.model.path
    if not run_dir.base_model.exists():
        from titan_rl.models.builtin.tiny import make_tiny

        with replacing(run_dir.base_model) as folder:  # a run that is killed must not leave half a model
            make_tiny(folder, seed=config.run.seed)
    return str(run_dir.base_model)
