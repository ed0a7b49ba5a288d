"""Hidden states -> the negative log-likelihood of each scored token. Imports torch only."""
