from engine.model.progress import unless_quick


def test_what_is_over_soon_shows_no_bar() -> None:
    """Each worker logged "Loading weights: 0 %" and "100 %" within 0.1 s."""
    now_s, told = 0.0, []
    report = unless_quick(lambda task, done, total: told.append((task, done, total)), lambda: now_s)
    report("Loading weights", 0, 3)
    now_s = 0.1
    report("Loading weights", 3, 3)
    assert told == []
    slow = unless_quick(lambda task, done, total: told.append((task, done, total)), lambda: now_s)
    slow("Loading weights", 0, 3)
    now_s = 2.0
    slow("Loading weights", 2, 3)
    slow("Loading weights", 3, 3)
    assert told == [("Loading weights", 2, 3), ("Loading weights", 3, 3)]
