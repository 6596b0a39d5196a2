"""Check run folders offline: python verify.py runs/DIR, or --all."""

from evidence.verify import main

if __name__ == "__main__":
    main()
