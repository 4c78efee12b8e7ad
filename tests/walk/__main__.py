"""python tests/walk: see walk.py, which needs the device to be there before torch is imported."""

import guard

if __name__ == "__main__":
    if reason := guard.missing():
        raise SystemExit(reason)
    guard.load()

    from walk import main

    main()
