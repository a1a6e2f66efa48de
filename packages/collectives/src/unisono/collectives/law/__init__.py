"""Prove that a training step does not depend on the number of ranks, or learn why it does: `check(build, step, batch)`."""

from unisono.collectives.law.check import CheckError, check, check_file
from unisono.collectives.law.diagnoses.finding import Finding
from unisono.collectives.law.report import LawBroken, Report

__all__ = ["CheckError", "Finding", "LawBroken", "Report", "check", "check_file"]
