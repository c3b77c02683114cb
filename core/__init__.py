"""How a step is put together: compose, init, jit, and the checks around them."""
