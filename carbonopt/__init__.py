"""carbonopt finds the training configuration with the lowest emissions.

The configuration still reaches a target quality.
"""

__version__ = "0.1.0"
