"""A reward that anybody can check: the share of vowels among a completion's letters."""


def share_of_vowels(prompts: list[str], completions: list[str]) -> list[float]:
    """One number from 0 to 1 for each completion; 0 for one without letters."""
    letters = [[sign for sign in text.lower() if sign.isalpha()] for text in completions]
    return [sum(sign in "aeiou" for sign in each) / max(len(each), 1) for each in letters]
