"""Any agent as a black box: an OpenAI-compatible endpoint in front of the policy, and what agents said through it, token by token."""
