"""Gateways with a scripted model."""

from __future__ import annotations

from scripted import make_gateway

__all__ = ["make_gateway"]
