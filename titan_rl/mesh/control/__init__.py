"""Decisions about members: dispatch, retries, repair, weight versions."""
