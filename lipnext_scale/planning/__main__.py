"""Walks from stdin, as JSON (walk.py). The absent GPU must be there before torch is imported."""

import os

from lipnext_scale.planning import guard

if __name__ == "__main__":
    if os.environ.get("LIPNEXT_WALK") != "cpu" and not guard.missing():
        guard.load()

    from lipnext_scale.planning.walk import main

    main()
