"""Tells hatchling what pyproject.toml cannot say: the wheel's tag, and where the sources are, as build_wheel.py found
them."""
import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    def update(self, metadata):
        source = os.environ["ATTND_SOURCE_URL"]
        metadata["urls"] = {"Source": source} if source else {}


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = os.environ["ATTND_WHEEL_TAG"]
