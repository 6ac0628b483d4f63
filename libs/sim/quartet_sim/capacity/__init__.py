"""Capacity: the cheapest mix of hardware classes that serves a trace within its targets.

``demand`` is what is asked for, by model, service class and prompt length; ``carrying`` what one worker takes of it;
``mix`` the integer program; ``sensitivity`` what binds and what else would do; ``rounds`` lets the simulator confirm a
mix, and asks for more where it does not. Needs the extra ``plan`` (SciPy's HiGHS).
"""
