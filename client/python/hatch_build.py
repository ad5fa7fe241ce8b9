"""Tells hatchling what pyproject.toml cannot say: the wheel's tag, and where the sources are, as build_wheel.py found
them."""
import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Pages of the sources, by what a package index calls them.
PAGES = {"Source": "", "Documentation": "/tree/v{version}/docs", "Changelog": "/blob/v{version}/CHANGELOG.md",
         "Issues": "/issues"}


class Urls(MetadataHookInterface):
    def update(self, metadata):
        source, version = os.environ["ATTND_SOURCE_URL"], os.environ["ATTND_VERSION"]
        metadata["urls"] = {name: source + page.format(version=version) for name, page in PAGES.items()} if source else {}


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = os.environ["ATTND_WHEEL_TAG"]
