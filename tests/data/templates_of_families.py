"""Chat templates written in the manner of the published families, with what is peculiar to each."""

# ruff: noqa: E501

QWEN2 = """{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- else %}{{- '<|im_start|>system\\nYou are Q.' }}{% endif %}
{%- if tools %}{{- '\\n<tools>' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>' }}{% endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
       (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>' + message.role }}{% if message.content %}{{- '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' and message.content is string %}
{%- set ns.searching = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{% endif %}{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
{%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none and messages %}
{%- set first = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{% endfor %}
{{- first + "<|eot_id|>" }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single tool-calls") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
{%- else %}{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{% else %}{{- message.content }}{% endif %}{{- "<|eot_id|>" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

MISTRAL_TOOLS = """{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] [' }}{% for tool in tools %}
{{- '{"type": "function", "function": ' + tool.function | tojson + '}' }}
{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- '][/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}{% for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}{{- ', ' }}{% else %}
{{- ']' + eos_token }}{% endif %}{% endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""

MISTRAL_SMALL = """{%- set today = strftime_now("%Y-%m-%d") %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set said = messages[0]['content'] %}
{%- else %}{% set said = messages[0]['content'][0]['text'] %}{% endif %}
{%- set rest = messages[1:] %}
{%- else %}{% set said = 'The current date is ' + today + '.' %}{% set rest = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + said + '[/SYSTEM_PROMPT]' }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST]' }}{% for block in message['content'] %}
{%- if block['type'] == 'text' %}{{- block['text'] }}{% else %}{{- '[IMG]' }}{% endif %}{% endfor %}
{{- '[/INST]' }}{% endif %}
{%- elif message['role'] == 'assistant' %}
{%- if message['content'] is string %}{{- message['content'] + eos_token }}
{%- else %}{{- message['content'][0]['text'] + eos_token }}{% endif %}{% endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}
{%- else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- if messages[0]['content'] is string -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{- '<|system|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'user' %}{{- '<|user|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% else %}{{- eos_token }}{% endif %}"""

PHI4 = """{% for message in messages %}{% if (message['role'] == 'system') %}
{{- '<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- elif (message['role'] == 'user') %}
{{- '<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- elif (message['role'] == 'assistant') %}
{{- '<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

GPT_OSS = """{%- macro kinds(tool) %}{% for name in tool.parameters.properties %}
{{- name }}{% if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{% endmacro %}
{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\nCurrent date: ' }}
{{- strftime_now("%Y-%m-%d") + '\\n\\nReasoning: ' + (reasoning_effort | default('medium')) }}
{{- '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
{%- set developer = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set developer = '' %}{% set loop_messages = messages %}{% endif %}
{%- if developer or tools %}{{- '<|start|>developer<|message|>' + developer }}
{%- for tool in tools or [] %}{{- '\\ntype ' + tool.function.name + '(' }}{{- kinds(tool.function) }}
{{- ')' }}{% endfor %}{{- '<|end|>' }}{% endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages %}
{%- if message.role == 'assistant' %}
{%- if "tool_calls" in message %}
{%- if message.content and message.thinking %}
{{- raise_exception("Cannot pass both content and thinking") }}
{%- elif message.content %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
{%- elif message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{% endif %}
{%- set tool_call = message.tool_calls[0] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
{%- set last_tool_call.name = tool_call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{% endif %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
{%- else %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- elif message.role == 'tool' %}
{%- if last_tool_call.name is none %}{{- raise_exception("no call before") }}{% endif %}
{{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content|tojson }}{{- "<|end|>" }}
{%- else %}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

GRANITE = """{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}
{%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " +
    strftime_now('%B %d, %Y') + ".\\nYou are G." %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}
{{- '<|end_of_text|>\\n' }}{% endif %}
{%- for message in loop_messages %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
{{- '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}
{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}{% endfor %}"""

SMOLLM3 = """{%- set today = strftime_now("%d %B %Y") -%}
{%- if messages[0].role == "system" -%}{%- set custom = messages[0].content -%}
{%- else -%}{%- set custom = "You are S." -%}{%- endif -%}
{{- "<|im_start|>system\\n## Metadata\\nToday Date: " ~ today ~ "\\n" ~ custom -}}
{%- if xml_tools or tools -%}{{- "\\n### Tools\\n" -}}
{%- for tool in (xml_tools or tools) -%}{{- tool | string ~ "\\n" -}}{%- endfor -%}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else "" -%}
{%- if message.role == "user" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
{%- elif message.role == "assistant" -%}
{% generation %}{{- "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
{%- endgeneration %}
{%- elif message.role == "tool" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}"""

COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{%- if system_message %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for message in loop_messages %}{% set content = message['content'] %}
{%- if message['role'] == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

COMMAND_R_TOOLS = """{{ bos_token }}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>## Available Tools\\n' }}
{%- for tool in tools %}{% set tool = tool.function %}
{{- 'def ' + tool.name + '(' }}{% for name, about in tool.parameters.properties.items() %}
{{- name + ': ' + about.type }}{% if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}
{{- ') -> List[Dict]\\n' }}{% endfor %}{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Action: ```json\\n[' }}
{%- for call in message.tool_calls %}{{- {'tool_name': call.function.name,
    'parameters': call.function.arguments} | tojson(indent=4) }}
{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ']```<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'tool' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' + message.content }}
{{- '</results><|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

R1 = """{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}
{%- set ns.system_prompt = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.is_tool = false %}{{- '<|User|>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set ns.is_tool = false %}{% for tool in message['tool_calls'] %}
{{- '<|Assistant|><|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<|end|>' }}{% endfor %}{{- eos_token }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|Assistant|>' + content + eos_token }}{% endif %}
{%- if message['role'] == 'tool' %}{% set ns.is_tool = true %}
{{- '<|output|>' + message['content'] + '<|output_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|Assistant|><think>\\n' }}{% endif %}"""

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

FAMILIES = {
    "chatml": {"default": CHATML},
    "qwen2": {"default": QWEN2},
    "qwen3": {"default": QWEN3},
    "llama3": {"default": LLAMA3},
    "mistral": {"default": MISTRAL},
    "mistral tools": {"default": MISTRAL_TOOLS},
    "mistral small": {"default": MISTRAL_SMALL},
    "gemma": {"default": GEMMA},
    "gemma3": {"default": GEMMA3},
    "phi3": {"default": PHI3},
    "phi4": {"default": PHI4},
    "gpt-oss": {"default": GPT_OSS},
    "granite": {"default": GRANITE},
    "smollm3": {"default": SMOLLM3},
    "command-r": {"default": COMMAND_R, "tool_use": COMMAND_R_TOOLS},
    "r1": {"default": R1},
}
"""Maps a family to its templates by name."""
