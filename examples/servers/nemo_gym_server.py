"""Serves one of NeMo Gym's resources servers by itself, as the package has it.

    python nemo_gym_server.py MODULE:CLASS PORT

Runs where nemo-gym is installed, and needs nothing of titan_rl. MODULE is below ``resources_servers``.
"""

import importlib
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient

module_name, _, class_name = sys.argv[1].partition(":")
host, port = "127.0.0.1", int(sys.argv[2])
module = importlib.import_module(f"resources_servers.{module_name}")
settings = dict(host=host, port=port, entrypoint="", name=class_name)
config = getattr(module, f"{class_name}Config")(**settings)
server = getattr(module, class_name)(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host=host, port=port, log_level="warning")
