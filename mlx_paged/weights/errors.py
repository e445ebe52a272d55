"""What loading a model raises at a user."""

from __future__ import annotations


class ModelError(ValueError):
    """A model can't be loaded; the message names what is wrong and the way out."""


class NotHereYet(ModelError):
    """A model would first have to be downloaded or converted, which was not allowed."""
