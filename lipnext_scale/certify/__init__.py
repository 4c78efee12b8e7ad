"""Certificates: the Lipschitz bound of the stored weights, certified radii, and their report."""

from lipnext_scale.certify.certifier import Certifier, certified_radii
from lipnext_scale.certify.layers import lipschitz_bound
from lipnext_scale.certify.lipschitz import spectral_norm_bound
from lipnext_scale.certify.loading import load_model
from lipnext_scale.certify.results import SampleResults

__all__ = [
    "Certifier",
    "SampleResults",
    "certified_radii",
    "lipschitz_bound",
    "load_model",
    "spectral_norm_bound",
]
