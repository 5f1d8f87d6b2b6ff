"""OpenAI's Responses on top of the chat: items in and out, stored responses, responses in the background."""
