"""lipnext_scale: training certified-robust LipNeXt classifiers at scale."""

__version__ = "0.1.0"
