"""Walks from stdin, as JSON (walk.py). The absent GPU must be there before torch is imported."""

from lipnext_scale.planning import guard

if __name__ == "__main__":
    guard.load()

    from lipnext_scale.planning.walk import main

    main()
