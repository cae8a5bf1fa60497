"""The kinds of actor that a run is made of."""

from titan_rl.actors.adapter_trainer import AdapterTrainer
from titan_rl.actors.generator import Generator
from titan_rl.actors.role import Role
from titan_rl.actors.trainer import Trainer
from titan_rl.actors.verifier import Verifier
from titan_rl.mesh.meshes import ActorClasses

ACTORS = ActorClasses(Trainer, Generator, Verifier, Role)
SERVICE_ACTORS = ActorClasses(AdapterTrainer, Generator, Verifier, Role)
"""Of a service: its trainer ranks hold the clients' adapters."""
