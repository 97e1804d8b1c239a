"""Can the policy that a configuration names be used? Asked before anything starts."""

from __future__ import annotations

import os
import sys

from policies.types import Policy
from prfaas.config import PolicyConfig
from prfaas.errors import ConfigError
from router.core.policy_loader import load_policy


def check_policy(policy: PolicyConfig) -> Policy:
    """An instance of the policy; `module:Class` is also looked for in the working directory.

    That directory comes last in the search, so that no file in it hides an installed package.

    Raises:
        ConfigError: it does not exist, cannot be imported, or refuses its parameters.
    """
    if ":" in policy.name and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return load_policy(policy.name, policy.parameters)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's module does when it is imported
        raise ConfigError(
            f"policy.name: `{policy.name}` cannot be used, its code raises {type(error).__name__}: {error}"
        ) from error
