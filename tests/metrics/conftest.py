"""A gateway to be watched."""

from scripted import make_gateway
from traffic import busy, samples

__all__ = ["busy", "make_gateway", "samples"]
