"""A whole fleet under a virtual clock: core's own decisions over simulated engines, on real traces.

``run.simulate`` is the door: a fleet (``spec.FleetSpec``), requests (``spec.Request``, made by ``workload``), a
policy's name, ``spec.Settings`` and a seed go in; a ``figures.Outcome`` comes out. Same arguments, same outcome, on any
machine and under any PYTHONHASHSEED. What is modelled and what is not: ``docs/simulation.md``.
"""
