"""The composition root: wires settings, stores, stages and processes together, once."""

from penstock.app.pipeline import Pipeline
from penstock.app.registry import RegisteredConsumer
from penstock.app.streams import Stream

__all__ = ["Pipeline", "RegisteredConsumer", "Stream"]
