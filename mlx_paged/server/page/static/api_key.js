// The server's API key, if it wants one. It lives as long as the tab.

const NAME = "mlx-paged-api-key";

export class ApiKey {
  #form;
  #field;

  /** `whenGiven` is called when the reader has entered a key. */
  constructor(form, whenGiven) {
    this.#form = form;
    this.#field = form.querySelector("input");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(NAME, this.#field.value.trim());
      this.#form.hidden = true;
      whenGiven();
    });
  }

  get isKnown() {
    return Boolean(sessionStorage.getItem(NAME));
  }

  get headers() {
    return this.isKnown ? { Authorization: `Bearer ${sessionStorage.getItem(NAME)}` } : {};
  }

  /** Show the field: the server has refused what we have. */
  ask() {
    this.#field.value = "";
    this.#form.hidden = false;
  }
}
