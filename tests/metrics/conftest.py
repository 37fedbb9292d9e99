"""A gateway to be watched."""

from scripted import make_gateway
from traffic import busy, router, samples

__all__ = ["busy", "make_gateway", "router", "samples"]
