"""What one step does: a pure function per concern, one file each.

``concern.py`` says what a concern is and where a new one goes. Optimizers are the pairs in ``sgd.py`` and ``adam.py``
over ``transform.py``; schedules are the functions in ``schedules.py``.
"""
