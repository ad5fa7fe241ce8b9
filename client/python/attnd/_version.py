"""The version of this package, which is that of the product: base/version.h."""

__version__ = "0.1.0"
