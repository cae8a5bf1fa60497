"""Copies beside other work: on a GPU in a stream of their own, ordered against it by events. A CPU has no streams, and
there nothing is done.

    the thread whose work it stands beside: follow ─▶ … ─▶ precede, before it changes what is copied
    the copying thread:                       running: copies ─▶ mark ─▶ … ─▶ synchronize, before bytes are read
"""

from contextlib import AbstractContextManager, nullcontext

import torch


class NoStream:
    """Stand-in for a stream on a CPU, where all work is synchronous."""

    is_asynchronous = False

    def follow(self) -> None:
        """What runs here from now on comes after all that the calling thread has asked of the device."""

    def running(self) -> AbstractContextManager:
        """Whatever the calling thread asks of the device within comes here."""
        return nullcontext()

    def mark(self) -> None:
        """What has come here so far is what ``precede`` is about."""

    def precede(self) -> None:
        """What the calling thread asks of the device from now on comes after the mark; the thread itself goes on."""

    def synchronize(self) -> None:
        """Wait until all that came here is done."""


class CudaStream(NoStream):
    is_asynchronous = True

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._mark: torch.cuda.Event | torch.Event | None = None

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def running(self) -> AbstractContextManager:
        return torch.cuda.stream(self._stream)

    def mark(self) -> None:
        self._mark = self._stream.record_event()

    def precede(self) -> None:
        if self._mark is not None:
            torch.cuda.current_stream(self._device).wait_event(self._mark)

    def synchronize(self) -> None:
        self._stream.synchronize()


def stream_for(*devices: torch.device) -> NoStream:
    """For copies between these devices: on the first that is a GPU."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return NoStream() if gpu is None else CudaStream(gpu)
