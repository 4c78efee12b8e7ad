"""Certificates: the Lipschitz bound of the stored weights, certified radii, and their report."""

from lipnext_scale.certify.certificate import Certificate, Certified, certified_share, certify
from lipnext_scale.certify.lipschitz import lipschitz_bound, spectral_norm_bound
from lipnext_scale.certify.loading import load_model
from lipnext_scale.certify.radius import certified_radii, evaluate_radii

__all__ = [
    "Certificate",
    "Certified",
    "certified_radii",
    "certified_share",
    "certify",
    "evaluate_radii",
    "lipschitz_bound",
    "load_model",
    "spectral_norm_bound",
]
