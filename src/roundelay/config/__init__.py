"""Configuration: one loader of TOML files and key=value pairs."""

from roundelay.config.loader import *  # noqa: F403
