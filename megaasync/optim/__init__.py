"""How weights move: update rules, which parameter gets which, learning rate, and the step that publishes weights."""
