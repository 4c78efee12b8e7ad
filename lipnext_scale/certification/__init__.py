"""Certificates: the Lipschitz bound of the stored weights, certified radii, and their report."""

from lipnext_scale.certification.bounds import lipschitz_bound, spectral_norm_bound
from lipnext_scale.certification.certificate import SampleResults
from lipnext_scale.certification.certifier import Certifier, certified_radii, load_model

__all__ = [
    "Certifier",
    "SampleResults",
    "certified_radii",
    "lipschitz_bound",
    "load_model",
    "spectral_norm_bound",
]
