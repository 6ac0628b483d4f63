"""Pure domain of Quartet: state, policies, state machines."""
