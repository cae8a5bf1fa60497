"""Models beside the policy: reference, critic, implicit reward."""
