"""Certificates: the Lipschitz bound of the stored weights, certified radii, and their report."""

from lipnext_scale.certification.certifier import (
    Certifier,
    certified_radii,
    lipschitz_bound,
    load_model,
)

__all__ = ["Certifier", "certified_radii", "lipschitz_bound", "load_model"]
